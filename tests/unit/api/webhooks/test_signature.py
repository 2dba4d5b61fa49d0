"""What receivers trust: the standard's own example, and whatever a library for the standard verifies."""

import base64
import time

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from api.webhooks.signature import new_secret, require_secret, signed

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
BODY = '{"test": 2432232314}'


def test_the_headers_are_those_of_the_standards_example() -> None:
    assert signed("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, BODY, SECRET) == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


def test_a_library_for_the_standard_verifies_them_and_refuses_what_was_changed() -> None:
    body, secret = '{"job": "Größe 🧮"}', new_secret()
    headers = signed("msg_1", int(time.time()), body, secret)
    assert Webhook(secret).verify(body.encode(), headers) == {"job": "Größe 🧮"}
    for other, changed, key in (
        (headers | {"webhook-id": "msg_2"}, body, secret),
        (headers, body.replace("j", "J"), secret),
        (headers, body, new_secret()),
        (signed("msg_1", int(time.time()) - 301, body, secret), body, secret),
    ):
        with pytest.raises(WebhookVerificationError):
            Webhook(key).verify(changed, other)


@pytest.mark.parametrize(
    "secret", ["", "secret", "whsec_", "whsec_c2hvcnQ=", "whsec_???", SECRET[6:], "whsec_" + "A" * 200]
)
def test_a_secret_that_the_standard_does_not_allow_is_refused(secret: str) -> None:
    with pytest.raises(ValueError, match="not a webhook secret"):
        require_secret(secret)


def test_secrets_are_long_and_never_the_same() -> None:
    one, other = new_secret(), new_secret()
    assert one != other and require_secret(one) == one
    assert len(base64.b64decode(one.removeprefix("whsec_"))) == 32
