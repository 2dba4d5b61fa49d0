"""Keeping the machine awake for as long as the process that asks for it lives, and letting it go with that."""

import os
import shutil
import subprocess
import sys
import threading

REASON = "a job trains on this machine"
_WEAKLY = 'systemd-inhibit --mode=block-weak "$@" || exec systemd-inhibit "$@"'
"""Weakly, so that the owner may have the machine sleep; before systemd 257 there is no other way."""


def command(platform: str = sys.platform, pid: int | None = None) -> list[str]:
    """What keeps a machine awake: on macOS until the process `pid` ends, on Linux until the end of standard input.

    Empty where no such tool is known.
    """
    if platform == "darwin":
        return ["caffeinate", "-i", "-w", str(pid or os.getpid())]
    if platform.startswith("linux"):
        held = ["--what=sleep:idle", "--who=ComputeShare", f"--why={REASON}"]
        return ["/bin/sh", "-c", _WEAKLY, "sh", *held, "cat"]
    return []


def stay_awake() -> subprocess.Popen[bytes] | None:
    """Keep this machine awake until this process ends, however that happens; None where no tool is known.

    What is returned must be kept: with it the machine may sleep again.
    """
    wanted = command()
    if not wanted or not shutil.which(wanted[0]):
        return None
    quiet = subprocess.DEVNULL
    try:
        keeper = subprocess.Popen(wanted, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
    except OSError:
        return None
    threading.Thread(target=keeper.wait, name="awake", daemon=True).start()  # it may end at once, where nobody hears it
    return keeper
