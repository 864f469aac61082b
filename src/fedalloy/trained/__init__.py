"""Trained models in use: taken out of runs, written to files, read again, asked about new samples."""

from fedalloy.trained.files import export, load_model
from fedalloy.trained.model import Model, Prediction
from fedalloy.trained.predict import predict

__all__ = ["Model", "Prediction", "export", "load_model", "predict"]
