"""vLLM: attention backends, a scheduler with admission, and observe mode. Installing the package is enough.

vLLM calls ``platform`` and ``register`` in each of its processes. Of themselves they only observe: the backends are for
those who ask for ``--attention-backend CUSTOM``, and for models that vLLM refuses on CPU.
"""

from __future__ import annotations

from importlib.metadata import entry_points

NAME = "sparse_attn"
GROUP = "vllm.platform_plugins"


def platform() -> str | None:
    """Entry point of the group ``vllm.platform_plugins``: the path of the platform's class, None on those of others."""
    from vllm.platforms import cpu_platform_plugin, cuda_platform_plugin

    if any(entry.name != NAME for entry in entry_points(group=GROUP)):  # vLLM takes one platform of other packages
        return None
    if cpu_platform_plugin() == "vllm.platforms.cpu.CpuPlatform":
        return f"{__name__}.cpu.SparseCpuPlatform"
    return f"{__name__}.cuda.SparseCudaPlatform" if cuda_platform_plugin() else None


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``. Calling it again does nothing."""
    from vllm.platforms import current_platform

    from . import observe

    observe.register()
    load = getattr(current_platform, "load_layers", None)
    if load:
        load()
    if type(current_platform).__module__.startswith("vllm_ascend."):
        from .. import vllm_ascend

        vllm_ascend.choose(type(current_platform))
