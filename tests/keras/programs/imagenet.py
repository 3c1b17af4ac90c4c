"""What Horovod's example for Keras and ImageNet does with Horovod: schedules by callbacks, and going on from files."""

import argparse
import os

import keras
import numpy as np
from sklearn.datasets import load_digits

import kvdist.keras as hvd  # import horovod.keras as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--base-lr", type=float, default=0.05)
parser.add_argument("--warmup-epochs", type=int, default=2)
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.keras")
parser.add_argument("--fp16-allreduce", action="store_true")
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(1 + hvd.rank())  # for the test: what is not broadcast differs

resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)) and hvd.rank() == 0:  # for the test: rank 0 alone
        resume_from_epoch = try_epoch
        break
resume_from_epoch = int(hvd.broadcast(resume_from_epoch, 0, name="resume_from_epoch"))
verbose = 1 if hvd.rank() == 0 else 0

digits = load_digits()
images, labels = digits.images[..., np.newaxis].astype("float32") / 16, keras.utils.to_categorical(digits.target)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
initial_lr = args.base_lr * hvd.size()

if resume_from_epoch > 0 and hvd.rank() == 0:
    model = hvd.load_model(args.checkpoint_format.format(epoch=resume_from_epoch), compression=compression)
else:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, kernel_regularizer=keras.regularizers.l2(5e-5)),
            keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5),
            keras.layers.Activation("relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    opt = hvd.DistributedOptimizer(keras.optimizers.SGD(initial_lr, momentum=0.9), compression=compression)
    model.compile(opt, "categorical_crossentropy", metrics=["accuracy", "top_k_categorical_accuracy"])

later = hvd.callbacks.LearningRateScheduleCallback
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr, warmup_epochs=args.warmup_epochs, verbose=verbose),
    later(initial_lr, multiplier=1.0, start_epoch=args.warmup_epochs, end_epoch=3),
    later(initial_lr, multiplier=lambda epoch: 1e-1, start_epoch=3, end_epoch=4),
    later(initial_lr, multiplier=lambda epoch: 1e-2, start_epoch=4),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint_format))

history = model.fit(
    images[:1400],
    labels[:1400],
    batch_size=args.batch_size,
    steps_per_epoch=1400 // args.batch_size // hvd.size(),
    callbacks=callbacks,
    epochs=args.epochs,
    verbose=verbose,
    initial_epoch=resume_from_epoch,
).history
score = hvd.allreduce(model.evaluate(images[1400:], labels[1400:], verbose=0))

# For the test; the optimizer's state too is that of the root.
rates = "/".join(f"{rate:.6f}" for rate in history["lr"])
print(f"rank {hvd.rank()} of {hvd.size()}: began {resume_from_epoch} accuracy {score[1]:.6f} lr {rates}")
variables = [*model.trainable_variables, *model.optimizer.variables]
print(f"digest {sum(float(np.abs(keras.ops.convert_to_numpy(v)).sum()) for v in variables)!r}", flush=True)
