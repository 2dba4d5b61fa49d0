"""Asks an evaluator for text from a job's language model."""

from api.broker import Broker
from api.jobs.history import History
from api.jobs.service import Jobs
from api.schemas import GenerateRequest, TextPublic
from computeshare.errors import SpecError
from computeshare.queue import text_requests
from computeshare.queue.text_requests import TextRequest


class Texts:
    """Generates text with checkpoints; an evaluator does the work, since the control plane imports no torch."""

    def __init__(self, jobs: Jobs, history: History, broker: Broker) -> None:
        self._jobs, self._history, self._broker = jobs, history, broker

    def generate(self, job_id: str, request: GenerateRequest) -> TextPublic:
        """Continue a prompt. Raises NotFound, NoEvaluator; SpecError: the job trains no language model, or its model
        knows none of the prompt's characters.
        """
        job = self._jobs.show(job_id)
        if not job.is_language_model:
            raise SpecError(f"{job.subject} does not generate text: choose a job that trains a language model")
        _, checkpoint = self._history.checkpoint(job_id, str(request.version))
        wanted = request.model_dump(exclude={"version"})
        asked = TextRequest(job_id=job_id, token=checkpoint.token, spec=job.spec, **wanted)
        text = text_requests.ask(self._broker.client(), asked)
        return TextPublic(version=checkpoint.version, prompt=request.prompt, text=text)
