"""Training strategies: one class per kind, with the kind's fields and all behaviour that differs between kinds.

Pure: arrays in, arrays out. Updates are combined in the order of units, so the result's bits do not depend on which
worker computed which update.
"""
