from keras_fixtures import deterministic, fresh_names

__all__ = ["deterministic", "fresh_names"]
