"""Run OpenEmbedding's programs one after the other in this process, with two import lines changed.

python openembedding_programs.py '[["examples/criteo_lr_subclass.py", "--save", "DIR"], …]'

Prints a line of JSON for each: its losses, or its error.
"""

import gc
import json
import sys
import traceback
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).with_name("openembedding")
sys.path.insert(0, str(HERE / "stand_ins"))
IMPORTS = {
    "import openembedding.tensorflow as embed": "import oe_runtime.tf_keras as embed",
    "import horovod.tensorflow.keras as hvd": "import oe_runtime.tf_keras.horovod as hvd",
}


def changed(program):
    """The text with our imports."""
    text = (HERE / program).read_text()
    for theirs, ours in IMPORTS.items():
        text = text.replace(theirs, ours)
    return text


def run(program, arguments):
    import requests

    requests.get = None  # DeepCTR asks PyPI for its newest version
    import deepctr.inputs
    import tensorflow as tf

    import oe_runtime.tf_keras as embed

    deepctr.inputs.Embedding = tf.keras.layers.Embedding  # a program replaces it

    tf.keras.backend.clear_session()
    embed.exb.save_server_model = embed.save_server_model
    embed.exb.load_server_model = embed.load_server_model
    vars(embed.flags).update(vars(embed.Flags()))
    tf.keras.utils.set_random_seed(1)
    module = ModuleType("__main__")
    module.__file__ = str(HERE / program)
    sys.modules["__main__"], sys.argv = module, [program, *arguments]
    fit, losses = tf.keras.Model.fit, []

    def kept(self, *args, **kwargs):
        history = fit(self, *args, **kwargs)
        losses.extend(history.history["loss"])
        return history

    tf.keras.Model.fit = kept
    try:
        exec(compile(changed(program), program, "exec"), module.__dict__)  # noqa: S102
    except Exception as error:
        traceback.print_exc()
        return {"error": str(error)}
    finally:
        tf.keras.Model.fit = fit
        if hasattr(module.__dict__.get("model"), "client"):
            module.model.client.close()
        module.__dict__.clear()
        gc.collect()
    return {"losses": losses}


if __name__ == "__main__":
    for program, *arguments in json.loads(sys.argv[1]):
        print("RESULT " + json.dumps(run(program, arguments)), flush=True)
