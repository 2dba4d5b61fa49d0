"""A worker's manners on somebody's own machine: when it rests, what it keeps awake, how it tells what it does."""
