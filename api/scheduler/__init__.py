"""Which worker has which seat: one level-triggered loop and the decisions it makes."""
