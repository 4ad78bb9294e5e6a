"""The idea of the chunked forms in torch's own operators, without loops. Exported graphs hold these forms."""
