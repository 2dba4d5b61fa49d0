"""Sizes of what workers write to the broker: readers check them before parsing, scripts before storing."""

NAME_CHARACTERS = 100
"""Of a session's or a submission's id, in bytes."""
WORKER_EVENT_BYTES = 65_536
"""Of what a worker says of itself or of a submission."""
EVENT_BYTES = 1_000_000
"""Of any event: a version's names all its units."""
ENTRY_BYTES = 4096
"""Of a received submission's record for one micro-batch."""
MEASUREMENT_BYTES = 16_384
"""Of a worker's measurements."""
RECORD_BYTES = 65_536
"""Of a worker's description, all fields together."""
LINE_BYTES = 200_000
"""Of a line of a job's log."""
