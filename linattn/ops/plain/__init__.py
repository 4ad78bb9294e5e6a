"""The chunked forms in torch's own operators, without loops over the length. Exported graphs hold these forms, because
whoever loads them may have no other operators. They serve every length, and torch differentiates them."""
