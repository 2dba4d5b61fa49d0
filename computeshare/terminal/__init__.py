"""Exit codes and errors of commands, and the display of values in a terminal."""
