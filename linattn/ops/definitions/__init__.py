"""The definitions: each operator's formula in plain torch, slow and obvious. Every other form must agree with them."""
