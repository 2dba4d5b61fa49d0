"""Every Redis key of ComputeShare, with its type and lifetime; no other Python module spells a key.

All keys of a job carry its id as the hash tag, so that a cluster keeps them in one slot and a worker's
credential can be confined to them.
"""

from dataclasses import dataclass

JOBS = "cs:jobs"
"""set: ids of the jobs that reducers and evaluators look after; kept by the control plane."""

CONTROL_LOCK = "cs:control"
"""string: which control plane runs the dispatcher and reads the events; expires."""

WORKERS = "cs:workers"
"""set: ids of workers that registered; the control plane removes those whose `worker` key expired."""

GIVEN_UP = "cs:given-up"
"""string: how many claims on jobs reducers have given up; a change tells standby reducers to look at every job."""

EVALUATOR = "cs:evaluator"
"""string: id of the evaluator that reported last; expires."""

RECIPE_EVALUATOR = "cs:recipe-evaluator"
"""string: id of the evaluator that reported last of those that run recipes; expires."""

TEXT_REQUESTS = "cs:text-requests"
"""list: ids of requests for text from a job's language model, which evaluators take; expires."""

BUNDLE_WANTS = "cs:bundle-wants"
"""hash: a process that fetches a bundle to `turn digest piece...`, the pieces that it wants next, with `!` before one
that it got damaged; expires.
"""

BUNDLE_ASKED = "cs:bundle-asked"
"""list: one element when somebody wants pieces of a bundle, to wake the control plane; expires."""

GATEWAY_TRAFFIC = "cs:gateway-traffic"
"""hash: `MACHINE:up` and `MACHINE:down` to the bytes that gateways carried for a machine; the control plane removes a
machine's when its invite is withdrawn.
"""

GATEWAYS = "cs:gateways"
"""set: ids of the gateways where machines hold something; another gateway removes one whose hash has expired."""

RELEASE = "cs:release"
"""string: version and protocol of the control plane (JSON), for the other processes to compare with their own."""

ROUNDS = "cs:{*}:*"
"""Matches every key of every job."""


OUTLIVING = (
    *("spec", "recipe", "recipe_signature", "creator", "origin"),
    *("events", "backlog", "taken", "logs", "strikes", "banned"),
)
"""The last parts of the keys that `outlives_rounds`."""


def gateway(gateway_id: str) -> str:
    """hash: a machine's id to `bytes values bytes values`, what it holds in the broker through this gateway: messages,
    then records; expires.
    """
    return f"cs:gateway:{gateway_id}"


def outlives_rounds(key: str) -> bool:
    """Whether a key of a job holds neither its rounds nor their messages, and so stays when the rounds are deleted."""
    return key.rpartition(":")[2] in OUTLIVING


def is_fence(key: str) -> bool:
    """Whether a key holds a job's newest fence."""
    return key.endswith(":fence")


def group_peers(group: str) -> str:
    """hash: as `JobKeys.peers`, of processes with training loops of their own; expires."""
    return f"cs:gossip:{group}:peers"


def group_peer(group: str, name: str) -> str:
    """hash: as `JobKeys.peer`, of a process of a group; expires."""
    return f"cs:gossip:{group}:peer:{name}"


def group_stage(group: str, stage: str) -> str:
    """stream: as `JobKeys.mail`, of the process that holds a stage of a script's model; expires."""
    return f"cs:pipeline:{group}:stage:{stage}"


def worker(worker_id: str) -> str:
    """hash: a worker's description (name, device, queues, versions, memory, seat, power, why it rests); expires unless
    refreshed.
    """
    return f"cs:worker:{worker_id}"


def orders(worker_id: str) -> str:
    """string: the control plane's orders to a worker (JSON: a seat to leave, why to leave for good); expires."""
    return f"cs:orders:{worker_id}"


def text_request(request_id: str) -> str:
    """string: a request for text (JSON); expires when nobody waits for the answer any more."""
    return f"cs:text-request:{request_id}"


def text_answer(request_id: str) -> str:
    """list: the answer to a request for text (JSON); expires."""
    return f"cs:text-answer:{request_id}"


def bundle_offers(digest: str) -> str:
    """set: names of the pieces of a bundle that the control plane has put into the broker; expires. `digest` is that of
    the bundle, in hex.
    """
    return f"cs:bundle-offers:{digest}"


def bundle_piece(piece: str) -> str:
    """string: a piece of a bundle, while somebody wants it; expires."""
    return f"cs:bundle-piece:{piece}"


def bundle_ready(fetcher: str) -> str:
    """list: one element, which of the pieces that a process wants are there, or `!` and why none is; expires."""
    return f"cs:bundle-ready:{fetcher}"


@dataclass(frozen=True, slots=True)
class JobKeys:
    """The keys of one job."""

    job_id: str

    def _key(self, *parts: object) -> str:
        return ":".join(["cs", f"{{{self.job_id}}}", *map(str, parts)])

    def spec(self) -> str:
        """string: the JobSpec as JSON; written by the control plane until the job is deleted."""
        return self._key("spec")

    def recipe(self) -> str:
        """string: the files of the job's recipe (JSON); written by the control plane until the job is deleted."""
        return self._key("recipe")

    def recipe_signature(self) -> str:
        """string: the control plane's signature over what the job has run; written with the recipe."""
        return self._key("recipe_signature")

    def measured(self, worker: str) -> str:
        """string: a worker's measurements (JSON), from which the reducer chooses the codecs of a job with `auto`;
        expires after a week.
        """
        return self._key("measured", worker)

    def probe(self, worker: str) -> str:
        """string: arbitrary bytes with which a worker measures its link; expires after a minute."""
        return self._key("probe", worker)

    def creator(self) -> str:
        """string: the name of whoever created the job, for the owners of the machines that train it."""
        return self._key("creator")

    def origin(self) -> str:
        """string: token of the checkpoint that a forked job starts from; without it, a job starts from its seed."""
        return self._key("origin")

    def round(self) -> str:
        """hash: status, token, base, version, first, count, carried, total, needed, cursor, opened, closed,
        recent (number of versions whose updates count), snapshot (the newest version whose weights are
        kept whole, where versions are published as differences), doubted (the token, if workers found its weights
        damaged), draft (the name of the draft that the version was, if it was one).

        The job is open while the hash exists.
        """
        return self._key("round")

    def weights(self, token: str) -> str:
        """hash: the published weights of a version, part by part; kept until the version after the next, or, where
        versions are published as differences and it is a snapshot, until the snapshot after the next.
        """
        return self._key("weights", token)

    def delta(self, token: str) -> str:
        """hash: a version's weights minus the previous version's, part by part, if the job publishes differences; kept
        until the snapshot after the next.
        """
        return self._key("delta", token)

    def news(self, token: str) -> str:
        """hash: the weights (or difference) of the version after this one, if small, under a key that workers can name
        before that version exists; kept until the version after that.
        """
        return self._key("news", token)

    def chain(self) -> str:
        """list: tokens of the versions whose `delta` is kept, oldest first; for the first, the `weights` are kept."""
        return self._key("chain")

    def state(self, token: str) -> str:
        """hash: the reducer's full-precision weights and optimizer state of a version, in pieces; kept until those of a
        later version are stored.
        """
        return self._key("state", token)

    def steps(self) -> str:
        """list: `BASE|UNIT,UNIT|TOKEN,TOKEN` for each version since the newest `state`, oldest first: the version
        before it, the units that made it, and the versions on which these were computed (empty: all on `BASE`).
        """
        return self._key("steps")

    def staged(self, nonce: str) -> str:
        """hash: a message not yet submitted or committed, part by part; expires. The nonce begins with its sender: a
        worker's is `WORKER:SUBMISSION:MICRO_BATCH`.
        """
        return self._key("staged", nonce)

    def update(self, token: str, micro_batch: int | str) -> str:
        """hash: the accepted update of a micro-batch, part by part; kept until the state of the resulting version, or
        of a later one, is stored.
        """
        return self._key("update", token, micro_batch)

    def leases(self) -> str:
        """hash of the current round: micro-batch to `session|expires_ms|leased_ms|worker`."""
        return self._key("leases")

    def backups(self) -> str:
        """hash of the current round: second leases on slow micro-batches, in the form of `leases`."""
        return self._key("backups")

    def free(self) -> str:
        """list of the current round: micro-batches carried over or handed back, leased before new micro-batches."""
        return self._key("free")

    def received(self) -> str:
        """hash of the current round: micro-batch to the JSON of its accepted submission."""
        return self._key("received")

    def early(self) -> str:
        """hash: as `received`, of the next round, whose units are leased meanwhile with a delay or an overlap."""
        return self._key("early")

    def offers(self) -> str:
        """hash of the current round: micro-batch to `worker|nonce|,PART,PART,`: the parts of its update that are staged
        while the update is not submitted yet.
        """
        return self._key("offers")

    def early_offers(self) -> str:
        """hash: as `offers`, of the next round, whose units are leased meanwhile with a delay or an overlap."""
        return self._key("early_offers")

    def draft(self, name: str) -> str:
        """hash: parts of the next version, made before the round is complete; the commit turns it into `weights` or
        `delta`, and notes its name, 32 random hex digits, in the round; expires.
        """
        return self._key("draft", name)

    def drafts(self) -> str:
        """stream: `token name part` for each part of a draft: the version that it follows; trimmed to the newest few
        hundred.
        """
        return self._key("drafts")

    def sessions(self) -> str:
        """hash: worker to its newest session; an older session is fenced."""
        return self._key("sessions")

    def speeds(self) -> str:
        """hash: worker to `unit_ms|at_ms`: mean milliseconds per unit, moving; time of its last submission."""
        return self._key("speeds")

    def arrivals(self) -> str:
        """list: milliseconds from a round's opening to each of the last 64 arrivals, newest first; deadlines follow."""
        return self._key("arrivals")

    def recent(self) -> str:
        """list: tokens of the versions that a submission may be based on, the current version first."""
        return self._key("recent")

    def handed(self) -> str:
        """list: ended sessions, each as `WORKER:SESSION`, whose inner optimizer state another worker may take over."""
        return self._key("handed")

    def inner(self, session: str) -> str:
        """hash: the inner optimizer state that a session, `WORKER:SESSION`, handed over or takes over, in pieces;
        expires after a day.
        """
        return self._key("inner", session)

    def suspects(self) -> str:
        """hash of the current round: micro-batch to the workers that sent non-finite values for that micro-batch."""
        return self._key("suspects")

    def kinds(self) -> str:
        """hash: worker to the digest of its machine's kind, as it said when it joined."""
        return self._key("kinds")

    def audits(self) -> str:
        """hash of the current round: leases on what a second machine computes as well, in the form of `leases`."""
        return self._key("audits")

    def copies(self) -> str:
        """hash of the current round: micro-batch to the record of the second machine's update, as in `received`."""
        return self._key("copies")

    def copy(self, token: str, micro_batch: int) -> str:
        """hash: the second machine's update of a micro-batch, part by part; kept until it was compared."""
        return self.update(token, f"{micro_batch}:copy")

    def disputes(self) -> str:
        """hash of the current round: micro-batch that another machine is to compute again, or has, to JSON.

        `parties`: the workers with the digests of their updates; empty once two machines sent the same. `copied`: true,
        the update stays and a copy is asked for; false, it was taken back. `ends`: until when the parties get no lease
        on the micro-batch, in milliseconds since the epoch.
        """
        return self._key("disputes")

    def strikes(self) -> str:
        """hash: machine (the first characters of its workers' ids) to the number of their refused submissions."""
        return self._key("strikes")

    def banned(self) -> str:
        """hash: banned worker to the reason for the ban."""
        return self._key("banned")

    def peers(self) -> str:
        """hash: worker to `token|units|loss|milliseconds since the epoch` of its newest published weights, until it
        leaves, where the strategy has peers: the version from which they are a difference, and the number of units
        that it has made.
        """
        return self._key("peers")

    def peer(self, worker: str) -> str:
        """hash: the message of a worker's newest published weights, part by part; expires."""
        return self._key("peer", worker)

    def stages(self) -> str:
        """string: where the model is split into stages, and what each asks of a worker (JSON); written once by the
        reducer, if the strategy is `pipeline`, and kept until the rounds end.
        """
        return self._key("stages")

    def members(self) -> str:
        """hash: worker to `session|seen|about` where workers hold stages of the model: when it was seen last, in
        milliseconds since the epoch, what it can do, and whether it listens on `here` (JSON). Removed when the worker
        leaves or stops answering.
        """
        return self._key("members")

    def here(self, session: str) -> str:
        """channel: a session that may hold stages listens on it, so that the broker knows when its process ends; each
        new placement is published there.
        """
        return self._key("here", session)

    def placement(self) -> str:
        """hash: `number` and `plan` (JSON): which sessions hold which stages of the model."""
        return self._key("placement")

    def mail(self, session: str) -> str:
        """stream: activations and gradients for the stages that a session holds, and its leader's orders; trimmed by
        the reader; expires.
        """
        return self._key("mail", session)

    def answers(self) -> str:
        """hash: sha1 of a submission's nonce to `place|outcome`, of the newest submissions (2,048 at least, 4,096 at
        most), and `places`, the number of all submissions so far.
        """
        return self._key("answers")

    def versions(self) -> str:
        """stream: one entry per version or change of status, to wake waiting processes; trimmed to the newest few."""
        return self._key("versions")

    def full(self) -> str:
        """list: one element when a round is full, to wake the reducer, which pops the element."""
        return self._key("full")

    def reducer(self) -> str:
        """string: the active reducer, `fence|host|pid|id`; expires unless refreshed."""
        return self._key("reducer")

    def fence(self) -> str:
        """string: the newest reducer's fence, a counter."""
        return self._key("fence")

    def events(self) -> str:
        """stream: the job's events, in order; trimmed by the control plane once stored."""
        return self._key("events")

    def backlog(self) -> str:
        """stream: events older than those in `events`, with submissions folded into counts; the reducer moves events
        here while the control plane is away; trimmed like `events`.
        """
        return self._key("backlog")

    def taken(self) -> str:
        """hash: `upto`, id of the newest event that a control plane may have read (events up to it are never folded),
        and `run`, the run id of the broker for which `upto` holds.
        """
        return self._key("taken")

    def logs(self) -> str:
        """stream: lines of the job's log; trimmed to the newest few thousand, and by the control plane once stored."""
        return self._key("logs")

    def scoring(self, token: str) -> str:
        """string: id of the evaluator, or of the scoring seat, that scores a checkpoint; expires."""
        return self._key("scoring", token)

    def score_requests(self, seat: str) -> str:
        """list: what a scoring seat is asked to score next (JSON); expires."""
        return self._key("score_requests", seat)

    def score_answer(self, request: str) -> str:
        """list: the answer to such a request (JSON); expires."""
        return self._key("score_answer", request)

    def seats(self) -> str:
        """hash: worker to its current seat's id; a process with an older seat leaves."""
        return self._key("seats")

    def messages(self) -> tuple[str, ...]:
        """The prefixes of the keys of versions, updates and peers' weights."""
        return tuple(self._key(kind, "") for kind in ("weights", "delta", "news", "state", "update", "peer", "draft"))

    def pattern(self) -> str:
        """Matches every key of the job, for deletion."""
        return f"cs:{{{self.job_id}}}:*"
