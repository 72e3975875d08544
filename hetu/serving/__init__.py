"""A trained model at work: a file that holds its graph, what opens it, and a small HTTP service (extra `serve`)."""

from .model_file import save_model
from .predictor import Predictor

__all__ = ["Predictor", "save_model"]
