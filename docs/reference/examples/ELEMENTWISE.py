import linattn

print(sorted(linattn.ELEMENTWISE)[:3])  # ['elu_plus_one', 'exp', 'identity']
