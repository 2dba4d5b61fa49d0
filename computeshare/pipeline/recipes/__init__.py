"""Recipes whose models are split: their stages compute in a confined process, whose messages the seat passes on."""
