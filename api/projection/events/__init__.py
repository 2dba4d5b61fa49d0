"""Turns the events of a job into rows, without a database; `handlers` names the function for each type of event."""
