"""Compares updates with the copies that other machines of the same kind computed, before they count."""

from collections.abc import Mapping, Sequence

import structlog

from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.refusal import AuditRecords, Received
from computeshare.protocol.round_store import RoundState
from computeshare.reducer.audits.suspicions import Suspicions
from computeshare.reducer.gather import Gatherer, Refused
from computeshare.types import machine_of

log = structlog.get_logger()


class Audits:
    """Compares updates with the copies that a second machine of the same kind computed, before they count.

    The same kind computes the same bits, so any difference is a lie or a fault. A third machine computes the unit
    again: whoever of the two sent something else is banned, and its updates of the round are refused.
    """

    def __init__(self, session: ReducerSession, gatherer: Gatherer, suspects: bool) -> None:
        """`suspects`: whether to ask for copies of updates that are unlike the others of their round."""
        self._session, self._gatherer = session, gatherer
        self._suspicions = Suspicions(session, gatherer) if suspects else None
        self._settled = set[int]()
        """Units of the round for which two machines sent the same."""
        self._disputed = set[int]()
        """Units of the round about which a third machine is to decide."""

    def check(self, base: RoundState, parts: Mapping[int, Received]) -> None:
        """Compare what can be compared. Raises Refused: some units were taken back, or copies are to be waited for."""
        records = self._session.audits()
        disputes = records.disputes.items()
        self._settled = {unit for unit, dispute in disputes if dispute.is_settled}
        self._disputed = {unit for unit, dispute in disputes if dispute.parties and not dispute.copied}
        if self._refuse_liars(base, parts, records.liars):  # with a delay, sent for this round before the ban
            raise Refused
        disputed = self._disputed & parts.keys()
        if not all(self._decide(base, parts, unit, records) for unit in sorted(disputed)):
            raise Refused
        copied = records.copies.keys() & parts.keys() - disputed - self._settled
        done = [self._compare(base, parts[unit], records.copies[unit], records) for unit in sorted(copied)]
        self._gatherer.settled = self._settled
        if not all(done):
            raise Refused
        if self._suspicions:
            self._suspicions.check(base, parts, records, self._settled)

    def _compare(self, base: RoundState, part: Received, copy: Received, records: AuditRecords) -> bool:
        """Compare an update with its copy; False: they differ, and the unit was taken back, or the copy proves nothing
        and the update is suspected, so that another copy is to be waited for.
        """
        kind, token, unit = records.kinds.get(part.worker), base.token, part.micro_batch
        workers, is_suspected = [part.worker, copy.worker], unit in records.disputes
        machines = {machine_of(part.worker), machine_of(copy.worker)}
        if kind is None or kind != records.kinds.get(copy.worker) or len(machines) < 2:
            return self._skip(base, part, workers, is_suspected)
        sent = [self._gatherer.digest((part.base, unit)), self._gatherer.digest((copy.base, f"{unit}:copy"))]
        digests = {worker: digest for worker, digest in zip(workers, sent, strict=True) if digest is not None}
        if len(digests) < 2:
            return self._skip(base, part, workers, is_suspected and sent[0] is not None)
        if sent[0] == sent[1]:
            self._close(base, part, "confirmed", workers)
            if self._suspicions and is_suspected:
                self._suspicions.clear(base, part)
            return True
        if {machine_of(worker) for worker in records.present if records.kinds.get(worker) == kind} - machines:
            return not self._session.dispute(token, part, digests)
        self._close(base, part, "undecided", workers)
        return True

    def _skip(self, base: RoundState, part: Received, workers: Sequence[str], is_suspected: bool) -> bool:
        """Forget a copy that proves nothing; False: the update is suspected, and another copy is to be waited for."""
        self._session.close_audit(base.token, part, "open" if is_suspected else "over")
        self._tell(base, part.micro_batch, "skipped", workers)
        return not is_suspected

    def _decide(self, base: RoundState, parts: Mapping[int, Received], unit: int, records: AuditRecords) -> bool:
        """Decide a dispute by a third machine's update; False: updates were refused."""
        parties, third = records.disputes[unit].parties, parts[unit].worker
        digest = self._gatherer.digest((parts[unit].base, unit))
        right = [worker for worker, sent in parties.items() if sent == digest]
        is_third = machine_of(third) not in {machine_of(worker) for worker in parties}
        is_third = is_third and records.kinds.get(third) in {records.kinds.get(worker) for worker in parties}
        if not is_third or len(right) != 1:
            self._close(base, parts[unit], "undecided", [*parties])
            return not self._refuse_beyond_share(base, parts, unit)
        (wrong,) = parties.keys() - {*right}
        reason = f"audit: its update for micro-batch {unit}, version {base.version}, was not what two machines computed"
        for worker in {wrong} | {one for one in records.present if machine_of(one) == machine_of(wrong)}:
            self._session.ban(base.token, worker, reason)
        refused = self._refuse_liars(base, parts, {machine_of(wrong): reason})
        self._settle(base, parts[unit])  # at last: a reducer that ends before decides again
        self._tell(base, unit, "mismatched", [wrong, *right, third])
        return not refused

    def _refuse_liars(self, base: RoundState, parts: Mapping[int, Received], liars: Mapping[str, str]) -> bool:
        """Take back all updates of these machines, given with the reason; whether there were any. Another third machine
        is to decide where one of these was to.
        """
        bad = [part for part in parts.values() if machine_of(part.worker) in liars]
        for part in bad:
            self._settled.discard(part.micro_batch)
            self._session.close_audit(base.token, part, "open" if part.micro_batch in self._disputed else "over")
            self._session.refuse(base.token, part, liars[machine_of(part.worker)], "damaged")
        return bool(bad)

    def _refuse_beyond_share(self, base: RoundState, parts: Mapping[int, Received], unit: int) -> bool:
        """Take an update back that nobody confirmed, if its machine would make more than its share by it."""
        machine = machine_of(parts[unit].worker)
        counted = [one for one in parts.values() if machine_of(one.worker) == machine]
        if sum(one.micro_batch not in self._settled for one in counted) <= self._gatherer.share_of(base.needed):
            return False
        self._session.refuse(base.token, parts[unit], "audit: undecided, and beyond its machine's share", "lost")
        return True

    def _settle(self, base: RoundState, part: Received) -> None:
        """Note that two machines sent the same for a unit."""
        self._settled.add(part.micro_batch)
        self._disputed.discard(part.micro_batch)
        self._session.close_audit(base.token, part, "agreed")

    def _close(self, base: RoundState, part: Received, outcome: str, workers: Sequence[str]) -> None:
        """End an audit after which the update `part` counts."""
        if outcome == "confirmed":
            self._settle(base, part)
        else:
            self._session.close_audit(base.token, part)
        self._tell(base, part.micro_batch, outcome, workers)

    def _tell(self, base: RoundState, unit: int, outcome: str, workers: Sequence[str]) -> None:
        about = {"version": base.version, "micro_batch": unit, "outcome": outcome, "workers": workers}
        self._session.announce("audited", about)
        if outcome in ("mismatched", "undecided"):
            log.warning("audited", job=self._session.job_id, **about)
