"""PEFT's default targets: an adapter's configuration without `target_modules` finds our projections."""

from transformers.utils.import_utils import is_peft_available

from linattn.models.storage import MODEL_TYPE

# the projections that have the names of Llama's
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def register_target_modules() -> None:
    """Copy Llama's entry in each of PEFT's tables, one per method, unless it names a projection that our model lacks.

    If PEFT is installed, transformers itself imports it, so this function imports nothing more."""
    if not is_peft_available():
        return
    from peft.utils import constants

    for name, table in vars(constants).items():
        if name.endswith("_MODULES_MAPPING") and set(table.get("llama", "?")) <= PROJECTIONS:
            table.setdefault(MODEL_TYPE, table["llama"])
