"""Which recipes, the code of other people, the owner of a machine lets run on it."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from redis import Redis

from computeshare.errors import RecipeUnfit, SettingsError
from computeshare.jobspec.tasks.recipe_facts import RECIPE_PATTERN
from computeshare.queue.roster import ALL_RECIPES
from computeshare.settings import Settings

if TYPE_CHECKING:
    from computeshare.jobspec.spec import JobSpec
    from computeshare.tasks.recipes.bundle import Bundle

MOST = 20
"""The most recipes that are named one by one."""
UNCONFINED = "add --unconfined to run recipes nevertheless, if you know who writes them"


@dataclass(frozen=True, slots=True)
class Consent:
    """An owner's consent to run recipes.

    Args:
        everything: all recipes that the control plane has signed.
        digests: of the recipes that were named.
        unconfined: even where nothing here can confine them.
        control_key: the control plane's public key, by which its signature is checked; empty: it is not known here.
    """

    everything: bool = False
    digests: tuple[str, ...] = ()
    unconfined: bool = False
    control_key: str = ""

    @classmethod
    def of(cls, settings: Settings) -> "Consent":
        """The consent in a worker's settings. Raises SettingsError: what is named is no recipe."""
        digests = tuple(filter(None, map(str.strip, settings.recipe.split(","))))
        for digest in digests:
            if not re.fullmatch(RECIPE_PATTERN, digest):
                raise SettingsError(
                    f"{digest[:80]!r} names no recipe: give sha256: and 64 hexadecimal digits, or package:NAME"
                )
        if len(digests) > MOST:
            raise SettingsError(f"at most {MOST} recipes can be named: allow all with --recipes")
        control_key = settings.resolve_control_key() if settings.recipes else ""
        return cls(settings.recipes, digests, settings.unconfined, control_key)

    @property
    def is_given(self) -> bool:
        return self.everything or bool(self.digests)

    def offered(self) -> tuple[str, ...]:
        """The recipes that the scheduler may place here: their digests, or `ALL_RECIPES`; none where they would run
        unconfined against the owner's will.
        """
        if not self.is_given or not self._may_run:
            return ()
        return (ALL_RECIPES,) if self.everything and self.control_key else self.digests

    @property
    def confinement(self) -> str:
        """By what recipes are confined here: a method's name; empty: none run here."""
        if not self.offered():
            return ""
        from computeshare.confinement.methods import method

        return method().name

    def told(self) -> list[str]:
        """The meaning of the consent on this machine, in sentences for its owner; empty without consent."""
        if not self.is_given:
            return []
        from computeshare.confinement.methods import method

        by = method()
        if not self._may_run:
            return [
                f"This machine runs no recipes: nothing here can confine them. {' '.join(by.remarks)} Or {UNCONFINED}."
            ]
        which = (
            "the recipes of your control plane"
            if self.everything and self.control_key
            else f"{len(self.digests)} recipes"
        )
        if len(self.digests) == 1 and not (self.everything and self.control_key):
            which = "the recipe that you named"
        how = (
            f"confined by {by.name}: it reads none of your files, writes to a folder of its own, and reaches no network"
            if by.confines
            else "not confined"
        )
        found = [f"This machine runs {which}, which are other people's code, {how}.", *by.remarks]
        if self.everything and not self.control_key:
            found.append(
                "This machine cannot tell which recipes the control plane has signed, because it does not know its "
                "public key: only those named with --recipe run here. Join by an invite, or set "
                "COMPUTESHARE_CONTROL_KEY to the text of control.pub in the control plane's home."
            )
        return found

    def require(self, redis: Redis, job_id: str, spec: "JobSpec") -> "Bundle":
        """The files of a job's recipe, if the owner lets it run.

        Raises: RecipeUnfit: the owner does not; RecipeError, as `recipes.recipe_of`.
        """
        from computeshare.queue import recipes

        bundle = recipes.recipe_of(redis, job_id, spec)
        if not self._may_run:
            raise RecipeUnfit(f"this machine runs no recipes, because nothing here can confine them: {UNCONFINED}")
        if spec.recipe in self.digests:
            return bundle
        named = f"start its worker with --recipe {spec.recipe} if you trust it"
        if not self.everything:
            raise RecipeUnfit(f"this machine does not run this recipe: {named}")
        if not self.control_key:
            raise RecipeUnfit(f"this machine cannot tell whether the control plane has signed this recipe: {named}")
        if not recipes.is_signed(redis, job_id, spec, self.control_key):
            raise RecipeUnfit(
                "the control plane has not signed this recipe with its arguments and its initial state: the job was "
                f"changed in the broker, or this machine knows the key of another control plane; {named}"
            )
        return bundle

    @property
    def _may_run(self) -> bool:
        from computeshare.confinement.methods import method

        return self.unconfined or method().confines
