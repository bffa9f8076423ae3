// The input for messages and images.
import { useEffect, useRef, useState } from "preact/hooks";
import { Icon, IconButton } from "../parts/controls";

const MAX_IMAGES = 8;
const MAX_IMAGE_BYTES = 10_000_000;
const IMAGE_TYPES = ["png", "jpeg", "gif", "webp", "bmp"].map((name) => `image/${name}`); // that servers read

interface Props {
  busy: boolean;
  sees: boolean;
  onSend: (content: string, images: string[]) => void;
  onStop: () => void;
}

export function Composer({ busy, sees, onSend, onStop }: Props) {
  const [draft, setDraft] = useState("");
  const [images, setImages] = useState<string[]>([]);
  const [fault, setFault] = useState("");
  const box = useRef<HTMLTextAreaElement>(null);
  const chooser = useRef<HTMLInputElement>(null);
  useEffect(() => {
    const area = box.current!;
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight, 260)}px`;
  }, [draft]);
  useEffect(() => {
    if (matchMedia("(pointer: fine)").matches) box.current?.focus();
  }, []);

  const submit = () => {
    if (busy || (!draft.trim() && !images.length)) return;
    onSend(draft.trim(), images);
    setDraft("");
    setImages([]);
    setFault("");
  };
  const add = async (files: Iterable<File>) => {
    const pictures = [...files].filter((file) => file.type.startsWith("image/"));
    if (!sees || !pictures.length) return;
    if (images.length + pictures.length > MAX_IMAGES) return setFault(`At most ${MAX_IMAGES} pictures in a message.`);
    const other = pictures.find((file) => !IMAGE_TYPES.includes(file.type));
    if (other) return setFault(`${other.name} is no PNG, JPEG, GIF, WebP or BMP.`);
    const large = pictures.find((file) => file.size > MAX_IMAGE_BYTES);
    if (large) return setFault(`${large.name} is larger than ${MAX_IMAGE_BYTES / 1e6} MB.`);
    const read = await Promise.all(pictures.map(dataUrl));
    setImages((old) => [...old, ...read]);
    setFault("");
  };

  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        submit();
      }}
      onDragOver={(event) => sees && event.preventDefault()}
      onDrop={(event) => {
        if (!sees) return;
        event.preventDefault();
        void add(event.dataTransfer?.files ?? []);
      }}
    >
      {images.length > 0 && (
        <ul class="thumbs" aria-label="Pictures to send">
          {images.map((image, i) => (
            <li>
              <img src={image} alt={`Picture ${i + 1}`} />
              <IconButton icon="close" label={`Remove picture ${i + 1}`} onClick={() => setImages(images.filter((_, j) => j !== i))} />
            </li>
          ))}
        </ul>
      )}
      {fault && (
        <p class="field-error" role="alert">
          {fault}
        </p>
      )}
      <div class="composer-row">
        {sees && (
          <>
            <input
              ref={chooser}
              type="file"
              accept={IMAGE_TYPES.join()}
              multiple
              hidden
              onChange={(event) => {
                void add([...(event.currentTarget.files ?? [])]);
                event.currentTarget.value = ""; // so that the same file can be chosen again
              }}
            />
            <IconButton icon="image" label="Add pictures" onClick={() => chooser.current?.click()} />
          </>
        )}
        <textarea
          id="prompt"
          ref={box}
          rows={1}
          aria-label="Message"
          aria-describedby="prompt-help"
          placeholder="Write a message"
          value={draft}
          onInput={(event) => setDraft(event.currentTarget.value)}
          onPaste={(event) => void add(event.clipboardData?.files ?? [])}
          onKeyDown={(event) => {
            if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
            event.preventDefault();
            submit();
          }}
        />
        {busy ? (
          <button type="button" class="send" onClick={onStop} aria-label="Stop" title="Stop (Escape)">
            <Icon name="stop" />
          </button>
        ) : (
          <button type="submit" class="send" aria-label="Send" title="Send (Enter)" disabled={!draft.trim() && !images.length}>
            <Icon name="send" />
          </button>
        )}
      </div>
      <p class="hint composer-help" id="prompt-help">
        <kbd>Enter</kbd> sends, <kbd>Shift</kbd> <kbd>Enter</kbd> starts a line, <kbd>Esc</kbd> stops. Models make mistakes.
      </p>
    </form>
  );
}

function dataUrl(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
