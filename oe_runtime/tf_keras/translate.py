"""tf-keras's optimizers, initializers and regularizers as those of Keras 3, which tables support."""

from __future__ import annotations

from typing import Any

import keras
import tf_keras

from oe_runtime.keras import translate

# The optimizers whose rule for dense variables equals Keras 3's and the servers'. (Nadam's differs: its
# product of momenta advances once per variable, not once per step.)
_OPTIMIZERS = sorted(
    {kind.__name__ for kind in translate.CLASSES} & vars(tf_keras.optimizers).keys() - {"Nadam"}
)

# Entries of an optimizer's configuration that do not concern a table.
_NOT_OF_ROWS = ("is_legacy_optimizer", "jit_compile", "learning_rate")


def distributed_optimizer(optimizer: Any, explicit: bool = True) -> Any:
    """Check that tables can be trained like dense variables by `optimizer`, and return it.

    Takes an optimizer of tf-keras whose rule tables have (`spec.OPTIMIZERS`, except Nadam), or its name.
    `DistributedModel.compile` gives every table the server's counterpart with the same hyperparameters, and
    each step pushes with its learning rate, schedules included. Only rows in a batch are updated, while
    tf-keras moves all rows by their momenta (SGD's momentum, Adam and its variants, Lion). Equal ids of a
    batch are summed first, as in tf-keras.

    `explicit` is OpenEmbedding's. Raises ValueError naming the optimizer or option that is not supported.
    """
    del explicit
    if isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            f"optimizer {type(optimizer).__name__} is of Keras 3, the model of tf-keras: take tf_keras's, "
            "or set TF_USE_LEGACY_KERAS=1 before TensorFlow is imported, which makes tf.keras tf-keras"
        )
    optimizer = tf_keras.optimizers.get(optimizer)
    table_optimizer(optimizer)
    return optimizer


def table_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return the server's counterpart of a tf-keras optimizer. Raises ValueError where there is none."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
        raise ValueError(
            f"optimizer legacy.{kind}: not offered; use tf_keras.optimizers.{kind}, whose rule tables have"
        )
    if kind not in _OPTIMIZERS or type(optimizer) is not getattr(tf_keras.optimizers, kind):
        raise ValueError(
            f"optimizer {kind} of tf-keras: embedding tables on the parameter servers do not support it; use "
            f"one of {', '.join(_OPTIMIZERS)}"
        )
    excluded = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_names")
    if optimizer.weight_decay and any(getattr(optimizer, name, None) for name in excluded):
        raise ValueError(
            f"optimizer {kind}: exclude_from_weight_decay is not supported for models of tf-keras; leave it "
            "or weight_decay out"
        )
    config = {name: v for name, v in optimizer.get_config().items() if name not in _NOT_OF_ROWS}
    return translate.table_optimizer(getattr(keras.optimizers, kind)(**config))


def keras3(part: Any) -> Any:
    """Return Keras 3's initializer or regularizer with the name and configuration of one of tf-keras.

    Anything else is returned unchanged: `translate` refuses it by its name.
    """
    for ours, theirs in (
        (keras.initializers, tf_keras.initializers),
        (keras.regularizers, tf_keras.regularizers),
    ):
        name = type(part).__name__
        if type(part) is getattr(theirs, name, None) and hasattr(ours, name):
            return getattr(ours, name)(**part.get_config())
    return part
