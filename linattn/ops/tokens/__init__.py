"""Operations on tokens before and after attention: chunks, missing tokens, packed sequences, rotary positions."""
