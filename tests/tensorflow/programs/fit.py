"""The cells of the notebook in the introduction to Horovod, for kvdist and today's Keras.

Each line that is not the introduction's is marked, and in docs/reference/collective.md; there are fewer steps.
"""

import sys

import kvdist  # import horovod
import kvdist_launch


def training_func(epochs=24, steps=500):
    import tensorflow as tf
    from sklearn.datasets import load_digits

    import kvdist.tensorflow as hvd  # import horovod.tensorflow as hvd

    hvd.init()
    tf.random.set_seed(1 + hvd.rank())  # for the test: the same numbers every time

    # Pinning GPUs (one GPU per process)
    gpus = tf.config.experimental.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

    mnist_images, mnist_labels = load_digits(return_X_y=True)  # the data: MNIST is downloaded
    mnist_images = mnist_images.reshape(-1, 8, 8) * (255.0 / 16.0)

    dataset = tf.data.Dataset.from_tensor_slices(
        (tf.cast(mnist_images[..., tf.newaxis] / 255.0, tf.float32), tf.cast(mnist_labels, tf.int64))
    )
    batch_size = 128
    dataset = dataset.repeat().shuffle(10000).batch(batch_size)

    # Horovod: adjust learning rate based on number of GPUs.
    scaled_lr = 0.001 * hvd.size()
    opt = tf.optimizers.Adam(scaled_lr)
    opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)

    mnist_model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Conv2D(64, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(padding="same"),  # the images: of 8 x 8 pixels 1 x 1 is left here
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )

    mnist_model.compile(
        loss=tf.losses.SparseCategoricalCrossentropy(),
        optimizer=opt,
        metrics=["accuracy"],
        jit_compile=False,  # experimental_run_tf_function=False
    )

    callbacks = [
        kvdist.tensorflow.keras.callbacks.BroadcastGlobalVariablesCallback(0),  # horovod.tensorflow...
        kvdist.tensorflow.keras.callbacks.MetricAverageCallback(),
        kvdist.tensorflow.keras.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
    ]

    if hvd.rank() == 0:
        callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.h5"))

    verbose = 1 if hvd.rank() == 0 else 0

    history = mnist_model.fit(
        dataset, steps_per_epoch=steps // hvd.size(), callbacks=callbacks, epochs=epochs, verbose=verbose
    ).history
    # For the test.
    digest = sum(float(abs(array).sum()) for array in mnist_model.get_weights())
    print(f"rank {hvd.rank()} of {hvd.size()}: accuracy {history['accuracy'][-1]:.6f} lr {history['lr'][-1]:.6f}")
    print(f"digest {digest!r}", flush=True)


# horovod.run(...)
kvdist_launch.run(training_func, tuple(map(int, sys.argv[1:])), np=2, verbose=False, disable_cache=True, use_mpi=True)
