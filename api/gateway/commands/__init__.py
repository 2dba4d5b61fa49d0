"""What machines may tell the broker: a parser of commands, the policy, and a filter that enforces it."""
