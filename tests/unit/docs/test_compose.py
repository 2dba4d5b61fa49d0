"""The containers of docker-compose.yml: what of them can be reached from outside."""

from pathlib import Path

import yaml

COMPOSE = yaml.safe_load((Path(__file__).resolve().parents[3] / "docker-compose.yml").read_text())


def test_only_the_public_profile_is_reached_from_other_machines_and_the_broker_from_nowhere() -> None:
    ports = {name: service.get("ports", []) for name, service in COMPOSE["services"].items()}
    assert ports["valkey"] == [] and "network_mode" not in COMPOSE["services"]["valkey"]
    assert ports.pop("caddy") == ["80:80", "443:443"] and COMPOSE["services"]["caddy"]["profiles"] == ["public"]
    assert all(port.startswith("127.0.0.1:") for published in ports.values() for port in published)
