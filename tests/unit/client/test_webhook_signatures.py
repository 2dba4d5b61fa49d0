"""What a receiver trusts: the standard's own example, and nothing that was changed since."""

import base64
from collections.abc import Mapping

import pytest

from computeshare.client.webhook_signatures import key_of, new_secret, sign, verify
from computeshare.errors import InvalidSignature

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105 - the example of the standard
BODY, SENT_S = b'{"test": 2432232314}', 1614265330
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
HEADERS = {
    "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
    "webhook-timestamp": str(SENT_S),
    "webhook-signature": SIGNATURE,
}


def check(
    headers: Mapping[str, str] = HEADERS, body: bytes | str = BODY, secret: str = SECRET, late_s: float = 0
) -> object:
    return verify(headers, body, secret, now_s=SENT_S + late_s)


def test_the_signature_is_the_one_of_the_standards_example() -> None:
    assert sign(HEADERS["webhook-id"], SENT_S, BODY, SECRET) == SIGNATURE


def test_a_notification_is_verified_and_read_whatever_the_headers_case() -> None:
    assert check() == {"test": 2432232314} == check(body=BODY.decode())
    assert check({name.title(): value for name, value in HEADERS.items()}) == {"test": 2432232314}


def test_one_of_several_signatures_is_enough() -> None:
    others = "v2,whatever v1,Ceo5qEr07ixe2NLpvHk3FH9bwy/WavXrAFQ/9tdO6mc="
    assert check(HEADERS | {"webhook-signature": f"{others} {SIGNATURE} v1"})


@pytest.mark.parametrize("signature", ["v1,", "v1", "v2," + SIGNATURE[3:], SIGNATURE[3:], SIGNATURE[:-3], "v1,ä\udcff"])
def test_another_signature_is_refused_however_it_is_malformed(signature: str) -> None:
    with pytest.raises(InvalidSignature, match="no signature matches"):
        check(HEADERS | {"webhook-signature": signature})


@pytest.mark.parametrize("change", [{"webhook-id": "msg_other"}, {"webhook-timestamp": str(SENT_S + 1)}])
def test_what_is_signed_cannot_be_changed(change: dict[str, str]) -> None:
    with pytest.raises(InvalidSignature, match="no signature matches"):
        check(HEADERS | change)
    with pytest.raises(InvalidSignature, match="no signature matches"):
        check(body=BODY.replace(b"4", b"5"))
    with pytest.raises(InvalidSignature, match="no signature matches"):
        check(secret=new_secret())


@pytest.mark.parametrize(("late_s", "said"), [(301, "301 s ago"), (-301, "301 s in the future")])
def test_what_was_sent_long_ago_is_refused_and_so_is_what_was_not_sent_yet(late_s: float, said: str) -> None:
    with pytest.raises(InvalidSignature, match=said):
        check(late_s=late_s)
    assert check(late_s=299) and check(late_s=-299)
    assert verify(HEADERS, BODY, SECRET, tolerance_s=1000, now_s=SENT_S + 999)


@pytest.mark.parametrize("name", HEADERS)
def test_a_missing_header_is_named(name: str) -> None:
    with pytest.raises(InvalidSignature, match=name):
        check({other: value for other, value in HEADERS.items() if other != name})


@pytest.mark.parametrize("text", ["now", "-5", "1e9", "١٦", "9" * 30, " 1614265330"])
def test_a_timestamp_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidSignature, match="no number of seconds"):
        check(HEADERS | {"webhook-timestamp": text})


@pytest.mark.parametrize("body", [b"hello", b"[1]", b"\xff", b'"x"'])
def test_a_signed_body_that_is_no_object_is_refused(body: bytes) -> None:
    signature = sign(HEADERS["webhook-id"], SENT_S, body, SECRET)
    with pytest.raises(InvalidSignature, match="no JSON"):
        check(HEADERS | {"webhook-signature": signature}, body)


@pytest.mark.parametrize(
    "secret", ["", "secret", "whsec_", "whsec_c2hvcnQ=", "whsec_???", SECRET[6:], "whsec_" + "A" * 200]
)
def test_a_secret_that_is_none_is_refused(secret: str) -> None:
    with pytest.raises(InvalidSignature, match="no secret"):
        key_of(secret)


def test_secrets_are_long_and_never_the_same() -> None:
    one, other = new_secret(), new_secret()
    assert one != other and len(key_of(one)) == len(base64.b64decode(one.removeprefix("whsec_"))) == 32
