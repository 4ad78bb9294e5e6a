import linattn

# mixtures such as "local+elu" are made of these names
print({"elu", "favor", "linformer", "local", "softmax"} <= set(linattn.ATTENTIONS))  # True
