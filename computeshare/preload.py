"""What the fork server imports before it forks reducers and evaluators: everything that takes seconds, once."""

import os

import computeshare.evaluator
import computeshare.training.datasets
import computeshare.training.scoring  # noqa: F401
from computeshare import reducer
from computeshare.processes import PARENT

reducer.warm()
os.environ[PARENT] = str(os.getpid())  # for the server's children: it may be dead before they can ask who forked them
