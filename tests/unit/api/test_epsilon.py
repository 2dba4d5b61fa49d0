"""What differential privacy comes to after some epochs."""

import pytest

from api.epsilon import epsilon
from computeshare.jobspec.privacy import Privacy


@pytest.mark.parametrize(
    ("noise", "epochs", "delta", "expected"),
    [(2.0, 1, 1e-5, 4.37718), (4.0, 1, 1e-5, 1.99309), (4.0, 10, 1e-5, 7.51128), (20.0, 100, 1e-6, 4.88655)],
)
def test_epsilon_is_that_of_an_accountant(noise: float, epochs: int, delta: float, expected: float) -> None:
    """The expected values are those of dp-accounting 0.6, by privacy loss distributions."""
    assert epsilon(Privacy(clip=1.0, noise=noise, delta=delta), epochs) == pytest.approx(expected, rel=1e-5)


def test_epsilon_grows_with_epochs_and_has_an_end() -> None:
    weak, strong = Privacy(clip=1.0, noise=0.01), Privacy(clip=1.0, noise=100.0)
    assert epsilon(strong, 0) == 0.0
    few, more, most = (epsilon(strong, epochs) or 0 for epochs in (1, 2, 1000))
    assert 0 < few < more < most
    assert epsilon(weak, 1) is None
