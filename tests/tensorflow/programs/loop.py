"""The loop of one's own in the introduction to Horovod, for kvdist and today's Keras; lines that differ are marked."""

import sys

import tensorflow as tf
from sklearn.datasets import load_digits

import kvdist.tensorflow as hvd  # import horovod.tensorflow as hvd

hvd.init()
tf.random.set_seed(1 + hvd.rank())  # for the test: the same numbers every time

images, labels = load_digits(return_X_y=True)
dataset = tf.data.Dataset.from_tensor_slices(
    (tf.cast(images.reshape(-1, 8, 8, 1) / 16.0, tf.float32), tf.cast(labels, tf.int64))
)
dataset = dataset.repeat().shuffle(10000).batch(64)
mnist_model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(16, 3, activation="relu"),
        tf.keras.layers.MaxPooling2D(),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy()
opt = tf.optimizers.Adam(0.005 * hvd.size())


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = mnist_model(images, training=True)
        loss_value = loss(labels, probs)

    # Horovod: add Horovod Distributed GradientTape.
    tape = hvd.DistributedGradientTape(tape)

    grads = tape.gradient(loss_value, mnist_model.trainable_variables)
    opt.apply_gradients(zip(grads, mnist_model.trainable_variables, strict=True))

    # Horovod: broadcast initial variable states from rank 0 to all other processes.
    # Note: broadcast should be done after the first gradient step to ensure optimizer initialization.
    if first_batch:
        hvd.broadcast_variables(mnist_model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)  # opt.variables()

    return loss_value


for batch, (images, labels) in enumerate(dataset.take(int(sys.argv[1]) // hvd.size())):
    loss_value = training_step(images, labels, batch == 0)

    if batch % 10 == 0 and hvd.local_rank() == 0:
        print(f"Step #{batch}\tLoss: {loss_value:.6f}")

# For the test.
digest = sum(float(abs(array).sum()) for array in mnist_model.get_weights())
print(f"rank {hvd.rank()} of {hvd.size()}: loss {float(loss_value):.6f} steps {int(opt.iterations)}")
print(f"digest {digest!r}", flush=True)
