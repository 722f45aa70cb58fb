"""fairseq models; importing this package registers every architecture (architectures.py)."""

from lightconv_plugin.models import architectures
from lightconv_plugin.models.config import ConvTransformerConfig
from lightconv_plugin.models.encoder_decoder import ConvTransformerModel

__all__ = ["ConvTransformerConfig", "ConvTransformerModel", "architectures"]
