"""The jobs' REST routes and services: create, list, change, fork, and read the recorded history."""
