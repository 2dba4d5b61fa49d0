"""What the fork server imports before it forks reducers and evaluators: everything that takes seconds, once."""

import computeshare.evaluator
import computeshare.training.datasets
import computeshare.training.scoring  # noqa: F401
from computeshare import reducer

reducer.warm()
