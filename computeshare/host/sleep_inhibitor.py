"""Keeps the machine awake for as long as the calling process lives."""

import os
import shutil
import subprocess
import sys
import threading

REASON = "a job trains on this machine"
_WEAKLY = 'systemd-inhibit --mode=block-weak "$@" || exec systemd-inhibit "$@"'
"""`block-weak` lets the owner put the machine to sleep; systemd before 257 has only the strong lock."""


def awake_command(platform: str = sys.platform, pid: int | None = None) -> list[str]:
    """The command that keeps a machine awake: on macOS until process `pid` ends, on Linux until standard input closes.

    Empty on other platforms.
    """
    if platform == "darwin":
        return ["caffeinate", "-i", "-w", str(pid or os.getpid())]
    if platform.startswith("linux"):
        held = ["--what=sleep:idle", "--who=ComputeShare", f"--why={REASON}"]
        return ["/bin/sh", "-c", _WEAKLY, "sh", *held, "cat"]
    return []


def stay_awake() -> subprocess.Popen[bytes] | None:
    """Keep this machine awake until this process ends in any way; None if there is no tool for this.

    To let the machine sleep earlier, close the standard input of the returned process and terminate it.
    """
    wanted = awake_command()
    if not wanted or not shutil.which(wanted[0]):
        return None
    quiet = subprocess.DEVNULL
    try:
        keeper = subprocess.Popen(wanted, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
    except OSError:
        return None
    threading.Thread(target=keeper.wait, name="awake", daemon=True).start()  # reaps a tool that ends at once
    return keeper
