import linattn

make = linattn.FEATURE_MAPS["hedgehog"]
feature_map = make(16, 4, 4)  # channels per head, heads, key heads
print(type(feature_map).__name__)  # HedgehogFeatureMap
