"""Everything about a load that files and options tell, before anything is dropped for it.

Runs in the server, which never imports MLX, while another model may be serving.
"""

from pathlib import Path

from backend.config import ModelOptions
from backend.model.checkpoint.adapters.files import adapter_directory, require_readable
from backend.model.checkpoint.config import read_config, require_weights
from backend.model.checkpoint.gate import require_sound


def require_loadable(options: ModelOptions, directory: Path) -> None:
    """Refuse a load that cannot work.

    Args:
        options: Of the load.
        directory: Of the model.

    Raises:
        LoadError: The message names the file, the field or the option.
    """
    require_sound(directory)
    read_config(directory)
    require_weights(directory)
    if draft := options.tuning.speculation.draft_model:
        require_sound(Path(draft))
    for adapter in options.adapters:
        place = adapter_directory(adapter, options.models_dir)
        require_sound(place)
        require_readable(place)
