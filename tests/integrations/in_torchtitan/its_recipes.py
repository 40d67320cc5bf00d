"""The recipes of RL that torchtitan comes with, of which ``fused`` finds each loss: their losses as JSON."""

import importlib.abc
import importlib.machinery
import json
import sys
import types

# what the recipes' modules import and no recipe uses: of each, any class
ABSENT = "monarch", "torchstore", "vllm", "renderers", "torchcomms", "tensorboard", "wandb"
DECORATORS = "endpoint", "concurrent_endpoint", "register_backend"


class AnyModule(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = (
            _itself
            if name in DECORATORS
            else type(name, (), {"__init__": _nothing, "__class_getitem__": _itself})
        )
        setattr(self, name, made)
        return made


def _itself(x):
    return x


def _nothing(self, *args, **options):
    pass


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return AnyModule(spec.name)

    def exec_module(self, module):
        pass


def main():
    sys.meta_path.append(Absent())
    import on_a_cpu  # noqa: F401
    from torchtitan.experiments.rl.examples.alphabet_sort import config_registry

    from rlkernel.integrations.torchtitan import fused

    found = {}
    for name, recipe in vars(config_registry).items():
        if name.startswith("rl_"):
            made = recipe()
            before, inside = type(made.trainer.loss).__qualname__, made.trainer.loss.loss_fn
            after = fused(made).trainer.loss
            assert after.loss_fn == inside
            found[name] = [before, f"{type(after).__module__}.{type(after).__qualname__}"]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
