"""Snapshots of a live module's state, to compare before and after a call."""


class Snapshot:
    """Attributes of a module, its submodules and configs, with the identity of each object."""

    def __init__(self, model):
        self.objects = []  # kept alive, so that no other object can take an identity
        self.state = {name: self._attributes(vars(module)) for name, module in model.named_modules()}
        configs = {name: module.config for name, module in model.named_modules() if hasattr(module, "config")}
        self.state |= {f"{name} config": self._attributes(vars(config)) for name, config in configs.items()}

    def _attributes(self, attributes):
        return {name: self._value(value) for name, value in attributes.items()}

    def _value(self, value):
        if isinstance(value, dict):
            return self._attributes(value)
        self.objects.append(value)
        return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


def assert_untouched(model, before):
    after = Snapshot(model)
    assert after.state.keys() == before.state.keys()
    for name, attributes in before.state.items():
        assert after.state[name] == attributes, f"{name or 'the model'} was changed"
