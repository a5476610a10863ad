"""tf-keras's optimizers, initializers and regularizers as those of Keras 3, which tables support."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf
import tf_keras

from oe_runtime.keras import translate
from oe_runtime.keras.row_updates import UpdatesRows, update_rows
from oe_runtime.keras.table_variable import TableVariable

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
    update_rows(optimizer, _UpdatesRows)
    return optimizer


class _UpdatesRows(UpdatesRows):
    """The methods for optimizers of tf-keras."""

    iterations: Any

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """See tf_keras.optimizers.Optimizer; also pushes the gradients of rows."""
        pairs = list(grads_and_vars)
        dense = self.apply_rows(pairs)
        if any(gradient is not None for gradient, _ in dense) or len(dense) == len(pairs):
            return super().apply_gradients(dense, *args, **kwargs)  # type: ignore[misc]
        return self.iterations.assign_add(1)

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> Any:
        """See tf_keras.optimizers.Optimizer; `minimize` calls it. Raises RuntimeError without a tape."""
        if tape is None:
            for one in var_list() if callable(var_list) else var_list:
                if isinstance(one, TableVariable):
                    return one.handle  # raises, as for any tape but ours
        return super().compute_gradients(loss, var_list, tape)  # type: ignore[misc]

    def _table_rule(self) -> dict[str, Any]:
        return table_optimizer(self)

    def _present_rate(self) -> Any:
        return learning_rate(self)


def learning_rate(optimizer: Any) -> Any:
    """Return the learning rate of the next update."""
    rate = optimizer._learning_rate
    if isinstance(rate, tf_keras.optimizers.schedules.LearningRateSchedule):
        return rate(optimizer.iterations)
    return tf.convert_to_tensor(rate)


def table_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return the server's counterpart of a tf-keras optimizer. Raises ValueError where there is none."""
    stock = translate.stock_class(optimizer)
    kind = stock.__name__
    if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
        raise ValueError(
            f"optimizer legacy.{kind}: not offered; use tf_keras.optimizers.{kind}, whose rule tables have"
        )
    if kind not in _OPTIMIZERS or stock is not getattr(tf_keras.optimizers, kind):
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
    return dict(_rule(kind, tuple(config.items())))


@functools.cache
def _rule(kind: str, config: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Return what tables have for an optimizer. Kept, because the one of Keras 3 makes variables."""
    return translate.table_optimizer(getattr(keras.optimizers, kind)(**dict(config)))


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
