"""The chunked forms in torch's own operators, without loops over the length. Exported graphs hold these forms."""
