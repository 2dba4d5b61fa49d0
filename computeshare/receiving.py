"""A worker's weights on their way: a version whole, or by the differences that lead to it."""

from collections.abc import Sequence

from computeshare.codecs import CODECS, DELTAS
from computeshare.codecs.messages import add_delta, decode_weights, is_news, weights_parts, weights_room
from computeshare.errors import CodecError
from computeshare.layout import Layout, Weights
from computeshare.rounds import Grant, Member, Pulled
from computeshare.spec import CodecName
from computeshare.types import Blob, Vector


class Inbox:
    """The versions of one job as a worker gets them; of those that come as differences it keeps the last weights."""

    def __init__(self, member: Member, codec: CodecName, layout: Layout, into: Vector | None = None) -> None:
        """`into`: where parameters (d,) of versions that come whole are decoded; by default each gets a vector."""
        self._into = into
        self._member, self._codec, self._layout = member, CODECS[codec], layout
        self._chained = codec in DELTAS
        self._room = weights_room(layout)
        self._held: Weights | None = None
        self._token = ""
        """Of the version held."""
        self.parts = weights_parts(layout)
        """How many a version's weights come in."""
        self.with_news = is_news(layout)
        """Whether they come with the news of the version."""
        self.bytes = 0
        """Of what has come."""

    def pull(self, token: str) -> tuple[Weights | None, Grant]:
        """A version's weights, None if they are gone, and a lease on its round. Raises CodecError."""
        if not self._chained:
            message, grant = self._member.pull(token, self.parts, self._room)
            return None if message is None else self._whole(message), grant
        pulled, grant = self._member.follow(self._token, token, self.parts, self._room)
        return None if pulled is None else self._followed(token, pulled), grant

    def decoded(self, grant: Grant) -> Weights:
        """The weights that came with the news of a version. Raises CodecError."""
        return (
            self._followed(grant.token, Pulled(None, [grant.weights])) if self._chained else self._whole(grant.weights)
        )

    def _whole(self, message: Sequence[Blob]) -> Weights:
        self.bytes += sum(map(len, message))
        return decode_weights(self._codec, message, self._layout, self._into)

    def _followed(self, token: str, pulled: Pulled) -> Weights:
        """The weights of a version, from what leads to it, kept for the next differences."""
        weights = self._held
        if pulled.whole:
            self.bytes += sum(map(len, pulled.whole))
            weights = decode_weights(CODECS["float32"], pulled.whole, self._layout)
        assert weights is not None  # a way that begins with those held was given because they are
        for message in pulled.deltas:
            self.bytes += sum(map(len, message))
            weights = add_delta(self._codec, message, self._layout, weights)
        if not token.endswith(self._layout.digest(weights)[:16]):
            raise CodecError(
                f"the differences that lead to version {token} give other weights: the broker has lost some"
            )
        self._held, self._token = weights, token
        return weights
