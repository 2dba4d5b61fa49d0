"""`python -m computeshare.worker.horse`: the child process that runs one seat (RQ's work horse)."""

from computeshare.host.sleep_inhibitor import stay_awake
from computeshare.runtime.processes import exit_with_parent, lower_priority

if __name__ == "__main__":
    exit_with_parent()  # before anything that takes time
    from computeshare.settings import Settings

    lower_priority(Settings().nice)
    awake = stay_awake()

    from computeshare.worker.rq_worker import run_horse

    run_horse()
