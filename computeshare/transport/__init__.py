"""Connections to the broker: large messages over sockets of their own, a limit to their rate."""
