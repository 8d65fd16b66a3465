"""The table of other sets of kernels. libliger's operators choose their own kernels by device, so that nothing stands
in it unless somebody registers it."""

from dataclasses import dataclass

LIGER_KERNEL_IMPL_ENV = "LIGER_KERNEL_IMPL"


@dataclass(frozen=True)
class ImplInfo:
    """A set of kernels: the types of device that it serves, those where it is the default, and its module.

    Raises ValueError where devices or module_path is empty, or a default is not among the devices.
    """

    name: str
    devices: tuple
    default_devices: tuple = ()
    module_path: str = ""

    def __post_init__(self):
        if not self.devices or not self.module_path:
            raise ValueError(f"{self.name}: devices and module_path must be given")
        if not set(self.default_devices) <= set(self.devices):
            raise ValueError(
                f"{self.name}: default_devices {self.default_devices} must be among devices {self.devices}"
            )


IMPL_REGISTRY: dict[str, ImplInfo] = {}


def register_impl(info):
    """Adds a set of kernels, in place of one of the same name."""
    IMPL_REGISTRY[info.name] = info


def select_impl(device, explicit=None):
    """The set named `explicit`, or else the first that is the default on this type of device, or None.

    Raises RuntimeError where no set has that name, or it does not serve the device.
    """
    if explicit is None:
        return next((info for info in IMPL_REGISTRY.values() if device in info.default_devices), None)
    if explicit not in IMPL_REGISTRY:
        raise RuntimeError(
            f"there is no set of kernels named {explicit!r}; registered: {', '.join(IMPL_REGISTRY) or 'none'}"
        )
    info = IMPL_REGISTRY[explicit]
    if device not in info.devices:
        raise RuntimeError(f"{explicit} does not serve {device}, only {', '.join(info.devices)}")
    return info
