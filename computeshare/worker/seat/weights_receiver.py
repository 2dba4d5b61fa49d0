"""Receives a version's weights: whole, or as a chain of differences."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from computeshare.codecs.messages import add_delta, decode_weights, encode_weights, is_news, weights_parts, weights_room
from computeshare.codecs.registry import CODECS, EXACT
from computeshare.errors import CodecError
from computeshare.protocol.worker_session import NO_DRAFT, Draft, Grant, Pulled, WorkerSession
from computeshare.tensors.layout import Layout, Weights
from computeshare.types import Blob, Token, Vector
from computeshare.worker.seat.drafts.draft_reader import DraftReader


class WeightsReceiver:
    """Reads and decodes the versions of one job; keeps the last weights if versions are published as differences.

    Each version is compared with the digest in its token: large weights by a thread while the worker computes on them,
    small ones afterwards, which takes less time than two threads that share an interpreter.
    """

    def __init__(
        self,
        session: WorkerSession,
        codec: str,
        layout: Layout,
        into: Vector | None = None,
        drafts: DraftReader | None = None,
        kept: int = 1,
        built: Weights | None = None,
    ) -> None:
        """`into`: vector (d,) to decode the parameters of whole versions into; by default a new vector each. `drafts`:
        reads parts of the next version while this one is computed on. `kept`: how many of the last versions that were
        fetched stay valid. `built`: what this machine's model began with; version 0 is not fetched if it has
        these weights, nor for the differences that lead from it to a later version.
        """
        self._into, self._drafts = into, drafts
        self._session, self._codec, self._layout = session, CODECS[codec], layout
        self.chained = self._codec.differences
        """Whether versions are published as differences from the version before."""
        copied = self.chained or len(layout.buckets) > 1
        self._rooms = [weights_room(layout) for _ in range(1 if copied else kept)]
        """Memory to receive versions, in turn: the first is the next to write to. Only weights of a single bucket may
        be views of it.
        """
        self._held: Weights | None = None
        self._token = ""
        """Token of the weights kept."""
        self._built = built
        """None once a version was asked for."""
        self._helper = ThreadPoolExecutor(1, "digest")
        self._digest: tuple[str, Callable[[], str]] | None = None
        """Token of the last weights received, and how to get their digest."""
        self._hashing: Future[str] | None = None
        self.parts = weights_parts(layout)
        """Number of parts of a version's weights."""
        self._is_news = is_news(layout)
        self.bytes = 0
        """Bytes received, those of drafts that were given up included."""

    @property
    def news(self) -> "WeightsReceiver | None":
        """This receiver, if weights are small enough to come with the notice of their version."""
        return self if self._is_news else None

    def look_out(self, token: str) -> None:
        """Begin to read parts of the version after `token` as they are drafted, into memory that nothing else uses."""
        if self._drafts:
            self._drafts.begin(token, self._rooms[0])

    def pull(self, token: str) -> tuple[Weights | None, Grant]:
        """A version's weights, None if they are gone, and a lease on its round. Raises CodecError."""
        self._settle()
        if (built := self._if_built(self._session, token)) is not None:
            return built, self._session.lease(token)
        draft = self._taken()
        if not self.chained:
            message, grant = self._session.pull(token, self.parts, self._rooms[0], draft)
            return None if message is None else self._whole(token, message, draft), grant
        pulled, grant = self._session.follow(self._token, token, self.parts, self._rooms[0], draft)
        return None if pulled is None else self._followed(token, pulled, draft), grant

    def decoded(self, grant: Grant) -> Weights:
        """Decode the weights that came with the notice of a version. Raises CodecError."""
        self._settle()
        if self.chained:
            return self._followed(grant.token, Pulled(None, [grant.weights]))
        return self._whole(grant.token, grant.weights)

    def fetch(self, session: WorkerSession, token: str) -> Weights | None:
        """A version's weights, compared with its digest, over another session; None if they are gone. They are valid
        until as many other versions have been fetched as are `kept`. Raises CodecError: they are damaged.
        """
        self._settle()
        if (built := self._if_built(session, token)) is not None:
            return built
        weights, draft = None, self._taken()
        if self.chained:
            if pulled := session.read_since(self._token, token, self.parts, self._rooms[0], draft):
                weights = self._followed(token, pulled, draft)
        elif message := session.read_weights(token, self.parts, self._rooms[0], draft):
            weights = self._whole(token, message, draft)
        if weights is not None and not self.is_right():
            self.forget()
            raise CodecError("they do not match its digest")
        if weights is not None:  # else the same memory is written anew, and the versions before stay valid
            self._rooms.append(self._rooms.pop(0))
        return weights

    @property
    def token(self) -> str:
        """Of the last weights received; empty: there are none, or they were damaged."""
        return self._digest[0] if self._digest else ""

    def is_right(self) -> bool:
        """Wait for the digest of the last weights: whether it matches their token."""
        if self._digest is None:
            return False
        token, digest = self._digest
        return token.endswith(digest()[:16])

    def forget(self) -> None:
        """Discard the last weights as damaged: the next version starts from a whole snapshot."""
        self._held, self._token, self._digest = None, "", None

    def _taken(self) -> Draft:
        """What was read of the next version; nothing else is read until `look_out`."""
        draft = self._drafts.take() if self._drafts else NO_DRAFT
        self.bytes += draft.bytes
        return draft

    def _if_built(self, session: WorkerSession, token: str) -> Weights | None:
        """Version 0's weights, if that is the version and this machine has built the same: in all jobs but forks. While
        version 0 is the newest snapshot, they are kept for the differences since.
        """
        if self._built is None:
            return None
        first = session.snapshot() if self.chained else token
        built, self._built = self._built, None
        if not first or Token.parse(first).version:
            return None
        if not self.chained and not self._codec.exact:
            built = decode_weights(self._codec, [*encode_weights(self._codec, built, self._layout)], self._layout)
        digest = self._layout.digest(built)
        if not first.endswith(digest[:16]):
            return None
        if self.chained:
            self._held, self._token = built, first
        if first != token:
            return None
        self._digest = token, lambda: digest
        return built

    def _settle(self) -> None:
        """Wait for the thread, since the next weights may overwrite the last."""
        if self._hashing:
            wait([self._hashing])

    def _compare(self, token: str, weights: Weights) -> Weights:
        if self._is_news:
            self._digest = token, partial(self._layout.digest, weights)
        else:
            self._hashing = self._helper.submit(self._layout.digest, weights)
            self._digest = token, self._hashing.result
        return weights

    def _count(self, message: Sequence[Blob], draft: Draft) -> None:
        """Count the bytes of a message, without the parts of `draft`, which are counted."""
        self.bytes += sum(len(part) for part in message if not draft.holds(part))

    def _whole(self, token: str, message: Sequence[Blob], draft: Draft = NO_DRAFT) -> Weights:
        self._count(message, draft)
        return self._compare(token, decode_weights(self._codec, message, self._layout, self._into))

    def _followed(self, token: str, pulled: Pulled, draft: Draft = NO_DRAFT) -> Weights:
        """Decode a version from a snapshot or the weights kept, and its differences; keep the result."""
        weights = self._held
        if pulled.whole:
            self._count(pulled.whole, draft)
            weights = decode_weights(EXACT, pulled.whole, self._layout)
        assert weights is not None  # the broker sends differences only from weights kept here
        for message in pulled.deltas:
            self._count(message, draft)
            weights = add_delta(self._codec, message, self._layout, weights)
        self._held, self._token = weights, token
        return self._compare(token, weights)
