"""Why a job has too few seats. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

from api.scheduler.eligibility import SHOWN, Excluded, shown
from api.scheduler.reasons import Reason
from api.scheduler.seat_planner import Available, Demand, HeldSeat, Pair

Kind = tuple[str, str, int, int, bool, bool]


def shortages(
    demands: Sequence[Demand],
    workers: Sequence[Available],
    held: Sequence[HeldSeat],
    out: Excluded,
    due: Mapping[str, int],
) -> dict[str, Reason | None]:
    """Why each job has too few seats (see `shortage`), by job.

    Jobs of one queue, minimum, priority and requirement share one reason, computed once, unless a job holds a seat or a
    worker is left out of it for another reason than the requirement.

    Args:
        due: each job's share of workers.
    """
    special = {seat.job_id for seat in held} | {job_id for job_id, _ in out.reasons.keys() - out.lacking.keys()}
    known: dict[Kind, Reason | None] = {}
    found = {}
    for demand in demands:
        share = due[demand.job_id]
        about = (demand, workers, held, out.reasons, demands, share, out.unmet.get(demand.job_id, ""))
        kind = (
            demand.queue,
            demand.requires,
            demand.minimum,
            demand.priority,
            demand.seats > 0,
            share >= demand.minimum,
        )
        if demand.job_id in special:
            found[demand.job_id] = shortage(*about)
            continue
        if kind not in known:
            known[kind] = shortage(*about)
        found[demand.job_id] = known[kind]
    return found


def shortage(
    demand: Demand,
    workers: Sequence[Available],
    held: Sequence[HeldSeat],
    out: Mapping[Pair, str] | None = None,
    others: Sequence[Demand] = (),
    share: int = 0,
    unmet: str = "",
) -> Reason | None:
    """Why a job has too few seats, and what would help; None if it has enough, or soon will.

    Args:
        out: why a worker gets no seat in a job.
        others: the demands of all jobs.
        share: the job's share of workers.
        unmet: what is missing, if no worker of the queue has what the job requires.
    """
    out, queue = out or {}, demand.queue
    mine = {seat.worker for seat in held if seat.job_id == demand.job_id and not seat.leaving}
    if len(mine) >= demand.minimum or not demand.seats:
        return None
    serving = [worker for worker in workers if queue in worker.queues]
    willing = [worker.id for worker in serving if worker.works]
    left_out = [why for worker in serving if (why := out.get((demand.job_id, worker.id)))]
    busy = {seat.worker: seat.job_id for seat in held if seat.job_id != demand.job_id}
    able = [worker for worker in willing if worker not in mine and (demand.job_id, worker) not in out]
    missing = demand.minimum - len(mine) - sum(worker not in busy for worker in able)
    if missing <= 0:
        return None
    if share >= demand.minimum and any(worker in busy for worker in able):
        return Reason("busy", f"Waiting for {_workers(missing)} on queue {queue}, which other jobs will release")
    higher = {other.job_id for other in others if other.priority > demand.priority}
    above = sum(busy.get(worker) in higher for worker in able)
    if above >= missing:
        serve = "serves a job" if above == 1 else "serve jobs"
        return Reason("busy", f"Waiting: {_workers(above)} on queue {queue} {serve} of higher priority")
    online = f"{_are(len(serving))} online"
    if taken := sum(worker in busy for worker in willing):
        online += f", {taken} busy with other jobs"
    off = [f"{_are(count)} {why}" for why, count in Counter(w.off for w in serving if w.off).most_common()]
    resting = Counter(worker.resting for worker in serving if worker.resting and not worker.off)
    off += [f"{count} resting: {why}" for why, count in resting.most_common()]
    if unmet:
        left_out = [unmet]
    having = f" with {demand.requires}" if demand.requires else ""
    needs = f"Needs {_workers(demand.minimum)} on queue {queue}{having}, {online}"
    text = "; ".join([needs, *off[:SHOWN], *shown(left_out)])
    return Reason("workers", text, missing)


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


def _are(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'}"
