"""A convolutional network learns handwritten digits by Keras' ``model.fit``, on several processes without servers.

    kvdist-launch -n 2 -s 0 python examples/keras_fit.py

It is the training of Horovod's introduction, with Keras on torch and with data that comes with scikit-learn. Without a
launcher it runs alone, and under torchrun, mpirun or srun as well. All processes print the same accuracy, which is that
of the same weights on the same held-out images; the first one writes a checkpoint after every epoch.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras reads it when it is imported

import keras
import numpy as np
import torch
from sklearn.datasets import load_digits

import kvdist.keras as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
parser.add_argument("--lr", type=float, default=0.001, help="of one process; it is multiplied by their number")
parser.add_argument("--checkpoints", type=Path, help="a folder for checkpoints; none are written without it")
args = parser.parse_args()

# The processes of one machine share its cores: more threads than that would only get in each other's way.
torch.set_num_threads(1)

# Step 1: become one of the ranks.
hvd.init()

# Step 2: where there are GPUs, each process takes its own.
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
keras.utils.set_random_seed(1 + hvd.rank())  # other images first on every rank; the weights become those of rank 0

# The data: every fifth image is for testing, the others are for training, and each rank has its part of those.
digits = load_digits()
images, labels = digits.images[..., np.newaxis].astype("float32") / 16, digits.target
is_test = np.arange(len(images)) % 5 == 0
test_images, test_labels = images[is_test], labels[is_test]
# All ranks do equally many steps: one with more would wait for gradients that nobody sends.
count = np.count_nonzero(~is_test) // hvd.size()
mine = slice(hvd.rank() * count, (hvd.rank() + 1) * count)
train_images, train_labels = images[~is_test][mine], labels[~is_test][mine]

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)

# Step 3: scale the learning rate by the number of ranks. Step 4: average the gradients.
scaled_lr = args.lr * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(scaled_lr))
model.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])

callbacks = [
    # Step 5: all ranks begin with the weights of rank 0.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
]
# Step 6: checkpoints are written by one rank.
if hvd.rank() == 0 and args.checkpoints:
    callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoints / "checkpoint-{epoch}.keras"))

history = model.fit(
    train_images,
    train_labels,
    batch_size=args.batch_size,
    epochs=args.epochs,
    callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,
).history

_, accuracy = model.evaluate(test_images, test_labels, verbose=0)
sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()}: Train_loss {history['loss'][-1]:.6f} Test_acc {accuracy:.6f}\n")
hvd.shutdown()
