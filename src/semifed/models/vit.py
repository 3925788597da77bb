"""A vision transformer from weights of the user, such as DINO's ViT-B/16, by way of the package transformers."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from semifed.errors import UserError, nearest
from semifed.models.backbones import Backbone, Setting
from semifed.models.batchnorm import freeze
from semifed.models.inputs import IMAGENET, input_form

if TYPE_CHECKING:  # its import takes seconds, for networks that few ask for
    from transformers import ViTConfig

TRAINABLE = ("all", "last", "none")
# Dropout would draw from the global random state; DINO's networks have none.
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class VisionTransformer(Backbone):
    """The class token after the last block and the final norm.

    "last" trains the last block, as GCD, SimGCD and FedLPA do; the final norm stays frozen then. Images are normalised
    by ImageNet's constants, with which DINO was trained.
    """

    pretrained = True

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        transformers = _transformers()
        if setting.weights is None:
            raise UserError(
                "model.weights: vit needs the directory of its weights, or their name on the Hugging Face hub"
            )
        trainable = setting.trainable or "last"
        if trainable not in TRAINABLE:
            raise UserError(f"model.trainable: '{trainable}' is unknown; {nearest(trainable, TRAINABLE)}")
        self._weights = setting.weights
        self.config: ViTConfig = (
            _read(transformers.ViTConfig, setting.weights, **_NO_DROPOUT)
            if setting.architecture is None
            else transformers.ViTConfig(**setting.architecture)
        )
        size = setting.input_size or self.config.image_size
        if size % self.config.patch_size:
            raise UserError(
                f"model.input_size: {size} is no multiple of this vit's {self.config.patch_size} pixels a patch"
            )
        self.form = input_form(setting, IMAGENET, size)
        self.features = self.config.hidden_size
        self.transformer = transformers.ViTModel(self.config, add_pooling_layer=False)
        blocks = len(self.transformer.layers)
        self.frozen_blocks = {"all": 0, "last": blocks - 1, "none": blocks}[trainable]
        if trainable != "all":
            for part in (
                self.transformer.embeddings,
                self.transformer.layernorm,
                *self.transformer.layers[: self.frozen_blocks],
            ):
                freeze(part)

    @property
    def architecture(self) -> dict[str, Any]:
        """The configuration that lies beside the weights."""
        config: dict[str, Any] = self.config.to_diff_dict()
        return config

    def load_pretrained(self) -> None:
        """Read the weights of the user."""
        kind = _transformers().ViTModel
        theirs, found = _read(
            kind, self._weights, config=self.config, add_pooling_layer=False, output_loading_info=True
        )
        if missing := sorted(found["missing_keys"]):  # they were drawn, from the global random state at that
            raise UserError(f"model.weights: '{self._weights}' lacks '{missing[0]}': it holds no vision transformer")
        self.transformer.load_state_dict(theirs.state_dict())

    def frozen_part(self, x: Tensor) -> Tensor:
        """Tokens [n, 1 + patches, features] before the first block that learns."""
        x = self.form(x)
        embeddings = self.transformer.embeddings
        tokens: Tensor = embeddings(x, interpolate_pos_encoding=self.form.size != self.config.image_size)
        return self._through(self.transformer.layers[: self.frozen_blocks], tokens)

    def trainable_part(self, maps: Tensor) -> Tensor:
        """Features [n, features]."""
        tokens = self._through(self.transformer.layers[self.frozen_blocks :], maps)
        features: Tensor = self.transformer.layernorm(tokens)[:, 0]
        return features

    def _through(self, blocks: nn.Module, tokens: Tensor) -> Tensor:
        if tokens.shape[0]:  # attention cannot reshape nothing; `len` would fix the number in an exported graph
            for block in blocks.children():
                tokens = block(tokens, None)
        return tokens


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError:
        raise UserError("model.name: vit needs the package transformers: pip install 'semifed[vit]'") from None
    return transformers


def _read(kind: Any, weights: str, **options: Any) -> Any:
    """A configuration or a network from a directory, or from the hub if the user wrote a name on it."""
    local = Path(weights).is_dir()
    if not local and (Path(weights).is_absolute() or weights.startswith((".", "~"))):
        raise UserError(f"model.weights: no directory '{weights}'; expected one with config.json and weights")
    talk = _transformers().utils.logging
    before = talk.get_verbosity()
    talk.set_verbosity_error()  # it would tell at length that a pooling layer is left aside
    talk.disable_progress_bar()
    try:
        return kind.from_pretrained(weights, local_files_only=local, **options)
    except (OSError, ValueError, RuntimeError) as error:
        where = "in this directory" if local else "on the hub under this name, and no such directory"
        first = str(error).splitlines()[0]
        raise UserError(f"model.weights: '{weights}': no vision transformer {where} ({first})") from None
    finally:
        talk.set_verbosity(before)
