"""Titles of the leaderboard's federations, in the order of docs/leaderboard.md."""

FEDERATIONS = {
    "digits-0.1": "Digits (8×8), strong label skew: Dirichlet 0.1",
    "digits-1": "Digits (8×8), mild label skew: Dirichlet 1.0",
    "groups": "Digits, two groups whose labels contradict one another",
    "rotations": "Digits, turned by 0, 90, 180 and 270 degrees",
    "architectures": "Digits, four architectures",
    "fashion-4-classes": "Fashion-MNIST, 40 images of 4 classes a client",
    "fashion-0.1": "Fashion-MNIST, strong label skew: Dirichlet 0.1",
    "fashion-1": "Fashion-MNIST, mild label skew: Dirichlet 1.0",
    "hospitals": "A table (breast cancer), four hospitals of unequal size",
    "tweets": "Tweets, an LSTM, Dirichlet 1.0",
    "cifar10": "CIFAR-10, 100 images of 4 classes a client",
}
REGIMES = {  # variants of the recipe `rivals`: the leaderboard's methods once more, where their papers show them ahead
    "drift": "Fashion-MNIST, logistic regression, two classes a client, 50 clients of which 10 take part",
    "long_local": "Digits, Dirichlet 0.5, ten epochs a round",
    "class_groups": "Fashion-MNIST, two groups of clients with the same four classes",
    "near_networks": "Fashion-MNIST, five classes a client, networks that differ in width",
}
