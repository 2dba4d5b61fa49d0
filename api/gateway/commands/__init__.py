"""Commands that machines may send to the broker: a parser, the policy, and a filter that enforces it."""
