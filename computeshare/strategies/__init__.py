"""How a job's model is moved: one class for each kind of strategy, with its fields and all that depends on the kind.

Pure: arrays in, arrays out. Combinations run in the order of units, so their bits do not depend on who computed what.
"""
