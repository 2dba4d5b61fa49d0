"""How the updates of a round become one. Pure: arrays in, arrays out.

Every combination runs in micro-batch order over the same list, so its bits do not depend on who computed what.
"""
